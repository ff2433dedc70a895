"""smcp_fx: makes convolutional networks as fast as asked."""
