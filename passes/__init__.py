"""Graph passes: what turns a traced model into a masked one, and that into a smaller one."""
