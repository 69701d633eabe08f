-- The first schema: the two tables that every store has, and one function for each step, so that a step is one statement.
--
-- Functions wait for others p_patience_ms at the most, then fail. They carry a version in their names: a later migration adds `append_v2` beside `append_v1`, and processes of the old
-- release go on working while those of the new one start. :schema stands for the schema's quoted name.

CREATE TABLE :schema.meta (
    name text PRIMARY KEY,
    value bigint NOT NULL
);
INSERT INTO :schema.meta VALUES ('turnkeeper_version', 0), ('clock_offset_ms', 0);

-- COLLATE "C": keys are listed in the order of their code points, whatever the database's language is.
-- The fill factor leaves room for a log's next head on its page, so that an append need not touch an index of this table.
CREATE TABLE :schema.head (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key text COLLATE "C" NOT NULL UNIQUE,
    incarnation bytea NOT NULL,
    tail bigint NOT NULL,
    compacted bigint NOT NULL,
    kind text NOT NULL,
    phase text NOT NULL,
    attention text,
    owner text,
    labels text NOT NULL,
    ttl_ms bigint NOT NULL,
    keep_until bigint NOT NULL,
    size bigint NOT NULL,
    created bigint NOT NULL,
    updated bigint NOT NULL
) WITH (fillfactor = 60);
CREATE INDEX head_attention ON :schema.head (key) WHERE attention IS NOT NULL;

-- Bodies were compressed by their writer where it was worth it: the server is not to try again, and keeps them beside their
-- sequence for as long as they fit a page.
CREATE TABLE :schema.record (
    log bigint NOT NULL,
    seq bigint NOT NULL,
    at bigint NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (log, seq)
) WITH (toast_tuple_target = 8160);
ALTER TABLE :schema.record ALTER COLUMN body SET STORAGE EXTERNAL;

-- The records behind a position, the tail and the store's time: one row at least, and `incarnation` is null without a log.
-- `late` tells that the server's clock is behind the log's last record; what is to be done about it is catch_up_v1.
-- Stable: what it sees is of one moment, also while others append.
CREATE FUNCTION :schema.read_v1(p_key text, p_incarnation bytea, p_seq bigint, p_patience_ms integer)
RETURNS TABLE (
    incarnation bytea, tail bigint, now bigint, restart boolean, seq bigint, at bigint, body bytea, late boolean
)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_log bigint;
    v_incarnation bytea;
    v_tail bigint;
    v_updated bigint;
    v_now bigint;
    v_restart boolean;
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    SELECT h.id, h.incarnation, h.tail, h.incarnation <> p_incarnation OR p_seq < h.compacted, coalesce(h.updated, 0),
            floor(date_part('epoch', clock_timestamp()) * 1000)::bigint + m.value
        INTO v_log, v_incarnation, v_tail, v_restart, v_updated, v_now
        FROM :schema.meta m LEFT JOIN :schema.head h ON h.key = p_key
        WHERE m.name = 'clock_offset_ms';
    RETURN QUERY SELECT v_incarnation, v_tail, greatest(v_now, v_updated), v_restart, r.seq, r.at, r.body, v_now < v_updated
        FROM (VALUES (1)) AS one LEFT JOIN :schema.record r
            ON r.log = v_log AND r.seq > CASE WHEN v_restart THEN 0 ELSE p_seq END
        ORDER BY r.seq;
END $$;

-- The server's clock was set back behind p_now, a time that the store has told: the store's clock goes on from there (LOG-3).
CREATE FUNCTION :schema.catch_up_v1(p_now bigint, p_patience_ms integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    UPDATE :schema.meta SET value = greatest(value, p_now - floor(date_part('epoch', clock_timestamp()) * 1000)::bigint)
        WHERE name = 'clock_offset_ms';
END $$;

-- One append. Outcomes: A appended, at `now`; G the guard does not hold at `now`; B behind, with what read_v1 gives;
-- L another transaction holds the log, and p_wait told not to wait for it.
-- An append of no records takes the log's lock until the end of the transaction, and sees to it that there is a log.
--
-- The store's time is the server's clock, in milliseconds, and an offset. It is read once the log is locked, and is not that of
-- the transaction's start: a guard is not judged on a time from before a long wait (LOG-4).
CREATE FUNCTION :schema.append_v1(
    p_key text, p_incarnation bytea, p_seq bigint, p_create boolean,
    p_kind text, p_phase text, p_attention text, p_owner text, p_labels text, p_ttl_ms bigint, p_keep_until bigint,
    p_not_before bigint, p_not_after bigint, p_compact bigint, p_size bigint, p_bodies bytea[],
    p_patience_ms integer, p_wait boolean
)
RETURNS TABLE (
    outcome text, incarnation bytea, tail bigint, now bigint, restart boolean, seq bigint, at bigint, body bytea
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_log bigint;
    v_incarnation bytea;
    v_tail bigint;
    v_updated bigint;
    v_offset bigint;
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    IF p_create THEN
        -- Waits for another who is making the same log, until that is in or undone.
        INSERT INTO :schema.head (
            key, incarnation, tail, compacted, kind, phase, attention, owner, labels, ttl_ms, keep_until,
            size, created, updated
        ) VALUES (
            p_key, p_incarnation, 0, 0, p_kind, p_phase, p_attention, p_owner, p_labels, p_ttl_ms, p_keep_until, 0, 0, 0
        ) ON CONFLICT (key) DO NOTHING;
    END IF;
    SELECT h.id, h.incarnation, h.tail, h.updated, (SELECT value FROM :schema.meta WHERE name = 'clock_offset_ms')
        INTO v_log, v_incarnation, v_tail, v_updated, v_offset
        FROM :schema.head h WHERE h.key = p_key FOR NO KEY UPDATE SKIP LOCKED;
    IF v_log IS NULL THEN
        IF NOT p_wait AND EXISTS (SELECT FROM :schema.head WHERE key = p_key) THEN
            outcome := 'L';
            RETURN NEXT;
            RETURN;
        END IF;
        SELECT h.id, h.incarnation, h.tail, h.updated INTO v_log, v_incarnation, v_tail, v_updated
            FROM :schema.head h WHERE h.key = p_key FOR NO KEY UPDATE;
        v_offset := (SELECT value FROM :schema.meta WHERE name = 'clock_offset_ms');
    END IF;
    IF v_log IS NULL OR v_incarnation <> p_incarnation OR v_tail <> p_seq THEN
        RETURN QUERY SELECT 'B', r.incarnation, r.tail, r.now, r.restart, r.seq, r.at, r.body
            FROM :schema.read_v1(p_key, p_incarnation, p_seq, p_patience_ms) r;
        RETURN;
    END IF;
    now := floor(date_part('epoch', clock_timestamp()) * 1000)::bigint + v_offset;
    IF now < v_updated THEN
        PERFORM :schema.catch_up_v1(v_updated, p_patience_ms);
        now := v_updated;
    END IF;
    IF now < p_not_before OR now > p_not_after THEN
        IF p_create THEN
            DELETE FROM :schema.head WHERE id = v_log;
        END IF;
        outcome := 'G';
        RETURN NEXT;
        RETURN;
    END IF;
    outcome := 'A';
    incarnation := p_incarnation;
    tail := p_seq + cardinality(p_bodies);
    UPDATE :schema.head h SET
        tail = append_v1.tail, compacted = greatest(h.compacted, p_compact), phase = p_phase, attention = p_attention,
        owner = p_owner, labels = p_labels, ttl_ms = p_ttl_ms, keep_until = p_keep_until, size = h.size + p_size,
        created = CASE WHEN p_seq = 0 THEN append_v1.now ELSE h.created END, updated = append_v1.now
        WHERE h.id = v_log;
    INSERT INTO :schema.record (log, seq, at, body)
        SELECT v_log, p_seq + b.number, append_v1.now, b.body FROM unnest(p_bodies) WITH ORDINALITY b (body, number);
    IF p_compact > 0 THEN
        DELETE FROM :schema.record WHERE log = v_log AND seq <= p_compact;
    END IF;
    RETURN NEXT;
END $$;

-- Heads in the order of their keys, behind p_last, from p_from up to but not including p_upto (null: to the end).
CREATE FUNCTION :schema.heads_v1(
    p_last text, p_from text, p_upto text, p_kind text, p_phase text, p_attention boolean, p_updated_before bigint,
    p_limit integer, p_patience_ms integer
)
RETURNS SETOF :schema.head LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    RETURN QUERY SELECT * FROM :schema.head h
        WHERE h.key > p_last AND h.key >= p_from AND (p_upto IS NULL OR h.key < p_upto)
            AND (p_kind IS NULL OR h.kind = p_kind) AND (p_phase IS NULL OR h.phase = p_phase)
            AND (p_attention IS NULL OR (h.attention IS NOT NULL) = p_attention)
            AND (p_updated_before IS NULL OR h.updated < p_updated_before)
        ORDER BY h.key LIMIT p_limit;
END $$;

-- Put a log there as it was in another store. Whether it was: not where there is a log.
CREATE FUNCTION :schema.restore_v1(
    p_key text, p_incarnation bytea, p_tail bigint, p_compacted bigint,
    p_kind text, p_phase text, p_attention text, p_owner text, p_labels text, p_ttl_ms bigint, p_keep_until bigint,
    p_size bigint, p_created bigint, p_updated bigint, p_seqs bigint[], p_ats bigint[], p_bodies bytea[],
    p_patience_ms integer
)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_log bigint;
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    INSERT INTO :schema.head (
        key, incarnation, tail, compacted, kind, phase, attention, owner, labels, ttl_ms, keep_until, size, created, updated
    ) VALUES (
        p_key, p_incarnation, p_tail, p_compacted, p_kind, p_phase, p_attention, p_owner, p_labels, p_ttl_ms, p_keep_until,
        p_size, p_created, p_updated
    ) ON CONFLICT (key) DO NOTHING RETURNING id INTO v_log;
    IF v_log IS NOT NULL THEN
        INSERT INTO :schema.record (log, seq, at, body)
            SELECT v_log, r.seq, r.at, r.body FROM unnest(p_seqs, p_ats, p_bodies) r (seq, at, body);
    END IF;
    RETURN v_log IS NOT NULL;
END $$;

-- Drop a log; with p_tail, only one whose tail that is. Whether there was one.
CREATE FUNCTION :schema.erase_v1(p_key text, p_tail bigint, p_patience_ms integer) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_log bigint;
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    DELETE FROM :schema.head WHERE key = p_key AND tail = coalesce(p_tail, tail) RETURNING id INTO v_log;
    -- A statement of its own: it also sees the records of an append that the first one waited for.
    DELETE FROM :schema.record WHERE log = v_log;
    RETURN v_log IS NOT NULL;
END $$;

-- Rows of the store's own tables that this session wrote lately: of use in a difference, within one transaction.
CREATE FUNCTION :schema.writes_v1() RETURNS bigint LANGUAGE sql AS $$
    SELECT sum(
        pg_stat_get_xact_tuples_inserted(t) + pg_stat_get_xact_tuples_updated(t) + pg_stat_get_xact_tuples_deleted(t)
    )::bigint FROM unnest(ARRAY[':schema.meta'::regclass, ':schema.head'::regclass, ':schema.record'::regclass]) t
$$;
