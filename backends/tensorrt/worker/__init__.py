"""Builds, measures and runs TensorRT engines where TensorRT is: needs Python 3.10, numpy, tensorrt, cuda-bindings.

No torch, nothing else of smcp_fx: the folder runs by itself, as one file that `archive` writes, under another
Python or on another device. `serving` answers requests, one JSON object a line; `client` asks them of a process
that may die; `main` works off a folder of requests.
"""

from __future__ import annotations

#: Of requests, answers and engine files' descriptions.
PROTOCOL = 1
