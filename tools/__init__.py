"""What people type: the `cachegraph` command."""
