"""The tap: residual-stream rows out of a forward pass, in the dtype of the wire."""
