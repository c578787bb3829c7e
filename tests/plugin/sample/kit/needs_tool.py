"""A module that cannot be imported because a dependency is not installed."""

import a_tool_that_is_not_installed  # tool

callbacks = [a_tool_that_is_not_installed.Callback()]
