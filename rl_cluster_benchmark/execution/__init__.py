"""Who collects experience, who learns from it, and who waits for whom."""
