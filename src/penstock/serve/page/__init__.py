"""Assets of the page at /: a chat or an image upload, and the stages."""
