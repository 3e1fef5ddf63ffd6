#!/bin/sh
# A drafter node with the drafter of the package.
exec cospec node join tcp://127.0.0.1:5710 --drafter draft_model --threads 1
