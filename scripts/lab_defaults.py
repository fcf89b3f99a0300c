"""Write JupyterLab's defaults into the virtual environment: no news pop-up, no update checks."""

import json
import sys
from pathlib import Path

from workbench.core.files import replace_file

settings = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
target = Path(sys.prefix) / "share/jupyter/lab/settings/overrides.json"
target.parent.mkdir(parents=True, exist_ok=True)
replace_file(target, json.dumps(settings, indent=1))
