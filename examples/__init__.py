"""Examples that run from the root of the repository; none is part of the package."""
