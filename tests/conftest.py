"""What every test shares: chance. With CI=true the same examples are tried each time, elsewhere new ones."""

import os

from hypothesis import settings

settings.register_profile("reproducible", derandomize=True, database=None, print_blob=True)
settings.register_profile("new each time", derandomize=False)
settings.load_profile("reproducible" if os.environ.get("CI") == "true" else "new each time")
