"""What tests of several folders share: commands, processes, made-up runs and programs that stand in for others."""
