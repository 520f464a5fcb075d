"""Measured rows as text, tables, pictures and pages."""
