"""Write the versions of Python and of the named packages, as they are installed, to a JSON file.

Usage: write_versions.py FILE PACKAGE...
"""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

target, *packages = sys.argv[1:]
versions = {"python": platform.python_version()} | {package: version(package) for package in packages}
Path(target).write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")
