"""One group for each role, so that people of the admin can be given one."""

from django.db import migrations

ROLES = ("viewer", "engineer", "approver")


def make_groups(apps, schema_editor):
    for role in ROLES:
        apps.get_model("auth", "Group").objects.get_or_create(name=role)


class Migration(migrations.Migration):
    dependencies = [
        ("access", "0002_idempotent_requests"),
        ("auth", "0012_alter_user_first_name_max_length"),
    ]

    # The way back leaves the groups: people may be in them.
    operations = [migrations.RunPython(make_groups, migrations.RunPython.noop)]
