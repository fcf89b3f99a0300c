"""Write JupyterLab's defaults into the virtual environment: no news pop-up, no update checks."""

import json
import os
import sys
from pathlib import Path

settings = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
target = Path(sys.prefix) / "share/jupyter/lab/settings/overrides.json"
target.parent.mkdir(parents=True, exist_ok=True)
temporary = target.with_suffix(".tmp")
temporary.write_text(json.dumps(settings, indent=1))
os.replace(temporary, target)
