"""Plain data about a job and its children as observed."""
