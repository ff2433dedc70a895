"""Graph passes: they turn a traced model into a masked one, and a masked one into a smaller one."""
