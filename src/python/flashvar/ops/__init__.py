"""The ops: what users call, and how torch knows them."""
