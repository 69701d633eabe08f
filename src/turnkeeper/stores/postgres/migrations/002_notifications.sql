-- Who waits for a log is told of its next change.
--
-- A waiter's session shares an advisory lock of the log for as long as it waits: the lock ends with the session, however that
-- ends, and looking for it writes nothing. A transaction that changes the log tries the same lock for itself, up to its
-- end. Either it gets it: then nobody waits, and who comes meanwhile is refused, and looks again. Or it does not: then
-- somebody waits, and it notifies. So no change falls between a waiter's look and its wait, whatever the isolation level is.
-- Who notified holds a lock of the whole server while it commits, so notifying unasked would let one commit at a time.
--
-- A trigger and not another append: processes of the old release notify too.

-- The advisory lock of a log; the schema's name keeps two stores in one database apart.
CREATE FUNCTION :schema.waiters_lock_v1(p_key text) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT hashtextextended(p_key COLLATE "C", hashtextextended(':schema' COLLATE "C", 0))
$$;

-- Where to listen: a name that fits, however long the schema's is, and that other programs do not use.
CREATE FUNCTION :schema.channel_v1() RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT 'turnkeeper_' || to_hex(hashtextextended(':schema' COLLATE "C", 0))
$$;

CREATE FUNCTION :schema.notify_v1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- A log that is being made has no record yet, and one that is only locked (an append of no records) did not change.
    IF NEW.tail IS NOT DISTINCT FROM coalesce(OLD.tail, 0) THEN
        RETURN NULL;
    END IF;
    IF NOT pg_try_advisory_xact_lock(:schema.waiters_lock_v1(coalesce(NEW.key, OLD.key))) THEN
        PERFORM pg_notify(:schema.channel_v1(), :schema.waiters_lock_v1(coalesce(NEW.key, OLD.key))::text);
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER notify AFTER INSERT OR DELETE OR UPDATE OF tail ON :schema.head
    FOR EACH ROW EXECUTE FUNCTION :schema.notify_v1();

-- Where a log ends; no row without one.
CREATE FUNCTION :schema.tail_v1(p_key text, p_patience_ms integer) RETURNS TABLE (incarnation bytea, tail bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    RETURN QUERY SELECT h.incarnation, h.tail FROM :schema.head h WHERE h.key = p_key;
END $$;
