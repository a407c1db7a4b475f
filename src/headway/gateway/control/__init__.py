"""The controller and the engines, in this process or in others (`remote/`)."""
