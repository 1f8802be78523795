"""The ops in plain torch operations: right everywhere, fast nowhere."""
