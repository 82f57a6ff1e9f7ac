"""The one exception of the demo: something the user can put right."""


class UserError(Exception):
    """A mistake in the command, the files or the installation, told in one clear sentence."""
