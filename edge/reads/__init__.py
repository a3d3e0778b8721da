"""From a name to an object, here or by a fill; and which objects there are."""
