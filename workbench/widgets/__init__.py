"""Interactive views for notebooks: timelines that redraw in the browser, and slider panels made from an experiment."""

from workbench.widgets.explore import explore
from workbench.widgets.timeline import Timeline, timeline_view, trace_view

__all__ = ["Timeline", "explore", "timeline_view", "trace_view"]
