"""What people and machines read of a result: tables, coloured text, JSON files."""
