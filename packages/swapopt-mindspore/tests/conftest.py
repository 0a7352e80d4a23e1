"""One thread and few log lines, for every test of this package."""

import os

# Read when mindspore is imported: 3 leaves out its warnings of deprecated calls inside itself.
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")
