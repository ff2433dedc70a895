"""Builds, measures and runs TensorRT engines where TensorRT is: needs Python 3.10, numpy, tensorrt, cuda-bindings.

No torch, nothing else of smcp_fx: the folder runs by itself, as one file that `archive` writes, under another
Python or on another device. `serving` answers requests, one JSON object per line; `client` sends them to a
process that may die; `main` answers a folder of requests.
"""

from __future__ import annotations

#: The version of requests, answers and engine files' descriptions.
PROTOCOL = 1
