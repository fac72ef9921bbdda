"""Reading runs back: published figures, statistics, plots, reports."""
