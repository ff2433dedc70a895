"""The channel graph: which channels of a network must be kept or removed together."""

from smcp_fx.channels.graph import ChannelGraph, build
from smcp_fx.channels.groups import Group

__all__ = ["ChannelGraph", "Group", "build"]
