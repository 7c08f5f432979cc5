"""Print what pyproject.toml asks for: `requirements.py build test dev`, one requirement a line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
wanted = list(project["project"]["dependencies"])
for extra in sys.argv[1:]:
    if extra == "build":
        wanted += project["build-system"]["requires"]
    else:
        wanted += project["project"]["optional-dependencies"][extra]
print("\n".join(wanted))
