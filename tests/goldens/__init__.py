"""What calls, planners and checks did when these files were written: see __main__.py."""
