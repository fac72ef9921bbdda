"""Showing runs and comparisons: tables, plots and pages."""
