"""Building blocks that know no family."""
