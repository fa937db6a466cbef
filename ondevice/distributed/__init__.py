"""Several machines that run one model: each has a range of its layers."""
