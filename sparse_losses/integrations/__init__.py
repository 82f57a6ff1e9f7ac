"""Where other packages meet ours: each file needs the package that it is named for."""
