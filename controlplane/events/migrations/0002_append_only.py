"""The head of the chain, and triggers that refuse to change events, whoever asks.

SQLite drops triggers together with a table that a later migration rebuilds: a migration that alters ``events_event``
must run ``guard`` again.
"""

from django.db import migrations

SQLITE = (
    "CREATE TRIGGER events_event_no_update BEFORE UPDATE ON events_event"
    " BEGIN SELECT RAISE(ABORT, 'events are append-only'); END",
    "CREATE TRIGGER events_event_no_delete BEFORE DELETE ON events_event"
    " BEGIN SELECT RAISE(ABORT, 'events are append-only'); END",
)
POSTGRESQL = (
    "CREATE FUNCTION events_refuse() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE EXCEPTION 'events are append-only'; END $$",
    "CREATE TRIGGER events_event_no_change BEFORE UPDATE OR DELETE ON events_event"
    " FOR EACH ROW EXECUTE FUNCTION events_refuse()",
    "CREATE TRIGGER events_event_no_truncate BEFORE TRUNCATE ON events_event"
    " FOR EACH STATEMENT EXECUTE FUNCTION events_refuse()",
)
UNGUARD_SQLITE = (
    "DROP TRIGGER events_event_no_update",
    "DROP TRIGGER events_event_no_delete",
)
UNGUARD_POSTGRESQL = (
    "DROP TRIGGER events_event_no_change ON events_event",
    "DROP TRIGGER events_event_no_truncate ON events_event",
    "DROP FUNCTION events_refuse()",
)


def guard(apps, schema_editor):
    for statement in {"sqlite": SQLITE, "postgresql": POSTGRESQL}[schema_editor.connection.vendor]:
        schema_editor.execute(statement)


def unguard(apps, schema_editor):
    statements = {"sqlite": UNGUARD_SQLITE, "postgresql": UNGUARD_POSTGRESQL}
    for statement in statements[schema_editor.connection.vendor]:
        schema_editor.execute(statement)


def begin_chain(apps, schema_editor):
    apps.get_model("events", "ChainHead").objects.create(pk=1, sequence=0, hash="0" * 64)


class Migration(migrations.Migration):
    dependencies = [("events", "0001_initial")]

    operations = [
        migrations.RunPython(begin_chain, migrations.RunPython.noop),
        migrations.RunPython(guard, unguard),
    ]
