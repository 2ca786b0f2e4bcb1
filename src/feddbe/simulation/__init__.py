"""The round loop, one client's part of it, and the engines that execute clients."""
