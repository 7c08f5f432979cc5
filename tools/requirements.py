"""Print requirements of pyproject.toml, one per line: the dependencies and the named extras.

`requirements.py build test dev`: "build" adds the build system, and cmake and ninja if the
machine does not have them; "only-build" prints nothing else.
"""

import shutil
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
wanted = [] if "only-build" in sys.argv else list(project["project"]["dependencies"])
for extra in sys.argv[1:]:
    if extra in ("build", "only-build"):
        wanted += project["build-system"]["requires"]
        # pip installs these by itself only with build isolation.
        wanted += [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    else:
        wanted += project["project"]["optional-dependencies"][extra]
print("\n".join(wanted))
