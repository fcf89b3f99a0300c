"""Headroom Workbench: why the GPU waits, as experiments that run."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "critical_microbatch", "load", "slugs", "verify"]


def load(slug: str):
    """Return the experiment named `slug`.

    Args:
        slug: name of a module of `workbench.experiments`, e.g. ``"fig30_submission_headroom"``.
    Raises:
        KeyError: no such experiment; the message lists close names.
    """
    from workbench.experiments import load as _load

    _show_whole_tables()
    return _load(slug)


def _show_whole_tables() -> None:
    """In a notebook, let polars show whole rows of our tables; elsewhere leave its settings alone."""
    import sys

    if "ipykernel" in sys.modules:
        import polars as pl

        pl.Config(
            tbl_rows=60,
            tbl_cols=20,
            fmt_str_lengths=120,
            tbl_hide_column_data_types=True,
            tbl_hide_dataframe_shape=True,
        )
        from IPython.core.getipython import get_ipython

        formatter: Any = getattr(get_ipython(), "display_formatter", None)
        if formatter is not None:
            formatter.formatters["text/html"].for_type(pl.DataFrame, _table_html)


def _table_html(frame) -> str:
    """Return a polars table as HTML without quotes around its texts; polars has no setting for it."""
    import re

    plain = frame._repr_html_().replace("<td>null</td>", "<td>–</td>")
    return re.sub(r"<td>&quot;(.*?)&quot;</td>", r"<td>\1</td>", plain, flags=re.DOTALL)


def slugs() -> list[str]:
    """Return the slugs of all experiments, in index order."""
    from workbench.experiments import slugs as _slugs

    return _slugs()


def verify(fn, *, steps: int = 3, warmup: int = 2, **options):
    """Profile a callable on the GPU and say whether its steps are synchronization-free.

    Source: report, Appendix B.6.
    """
    from workbench.measure.capture import verify as _verify

    return _verify(fn, steps=steps, warmup=warmup, **options)


def critical_microbatch(prepare, sizes=(256, 512, 1024, 2048, 4096, 8192), **options):
    """Measure where your own region's device time meets its submission time; see `fig32_critical_microbatch`.

    Args:
        prepare: size -> a callable without arguments that runs the region at that size.
        sizes: at least two sizes, ascending.

    Source: report, Section 8.3, Equation 12.
    """
    from workbench.experiments.fig32_critical_microbatch import critical_microbatch as _critical

    return _critical(prepare, sizes, **options)


def load_ipython_extension(ipython) -> None:
    """Register the `%%headroom` cell magic."""
    from workbench.magic import load_ipython_extension as _load

    _load(ipython)
