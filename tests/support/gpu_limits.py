"""How long the parts of a run on a GPU may take.

A borrowed machine runs one command for ten minutes at most, so the limits of all parts together are shorter.
What exceeds its limit fails, and the others still run."""

RUN_S = 540
CODECS_S = 45  # each file of the codecs' tests
SANITIZER_S = 60  # each tool, over the codecs' kernels
PAGES_S = 60  # the sanitizer, over the copies of pages
OTHERS_S = 120  # the tests that run in this process

FILES = ("test_codecs.py", "test_quantized.py", "test_calibrated.py", "test_cuda_codecs.py")
TOOLS = ("memcheck", "racecheck", "initcheck")
