"""A run on several nodes: node 0 controls, the others do what it says (docs/nodes.md)."""
