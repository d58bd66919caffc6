"""Where parameters go: what a rank holds of each, and how memory for it is made."""
