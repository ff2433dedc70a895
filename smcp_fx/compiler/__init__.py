"""The compile command as a library: from a model, data and a target to measured files."""

from smcp_fx.compiler.pipeline import compile_model
from smcp_fx.compiler.settings import CompileSettings

__all__ = ["CompileSettings", "compile_model"]
