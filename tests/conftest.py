"""For all tests: those that need another kernel find one."""

pytest_plugins = ["vm.plugin"]
