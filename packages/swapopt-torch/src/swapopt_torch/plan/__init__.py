"""`python -m swapopt_torch plan`: what swapping will cost a model that does not fit here.

One rank's shard is stepped on the dry virtual accelerator: real Python and real allocations, no
memory and no computing. Needs the ``cli`` extra; nothing that trains imports it.
"""
