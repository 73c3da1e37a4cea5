"""What every test shares: chance. With CI=true the same examples are tried each time, elsewhere new ones.

No example has a deadline: what a busy machine does to one says nothing about gpunode.
"""

import os

from hypothesis import settings

settings.register_profile("reproducible", derandomize=True, database=None, print_blob=True, deadline=None)
settings.register_profile("new each time", derandomize=False, deadline=None)
settings.load_profile("reproducible" if os.environ.get("CI") == "true" else "new each time")
