"""Playing with a trained agent: rewards and videos."""
