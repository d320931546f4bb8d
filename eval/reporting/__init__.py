"""The report: its fields, its tables, its pages."""
