"""Two nodes on one machine: each has its own network, mounts, process numbers and host name."""
