"""Which kernel serves a request on a machine, and why the others do not."""
