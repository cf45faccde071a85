import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;

/** Compares Wire with docs/wire-vectors.json. */
final class Vectors {
    private final Map<String, Object> vectors;
    private int count;

    private Vectors(Map<String, Object> vectors) {
        this.vectors = vectors;
    }

    /** Throws an AssertionError at the first difference, and returns the number of vectors. */
    static int check(String file) throws Exception {
        Vectors all = new Vectors(object(Wire.JSON.fromJson(Files.readString(Path.of(file)), Object.class)));
        for (Object one : list(all.vectors.get("routes"))) all.checkRoute(object(one));
        for (String group : List.of("refused", "hashed")) {
            for (Object one : list(all.vectors.get(group))) all.checkRefused(object(one));
        }
        for (Object one : list(all.vectors.get("received"))) all.checkReceived(object(one));
        for (Map.Entry<String, Object> one : object(all.vectors.get("partitions")).entrySet()) {
            all.equal(one, whole(one.getValue()), (long) Wire.partition(one.getKey()));
        }
        for (Object one : list(all.vectors.get("records"))) all.checkRecord(object(one));
        for (Object one : list(all.vectors.get("questions"))) all.checkQuestion(object(one));
        return all.count;
    }

    private void checkRoute(Map<String, Object> vector) {
        Wire.Delayed made = made(vector);
        Map<String, Object> publish = new HashMap<>(Map.of("headers", made.publish().headers()));
        if (made.publish().priority() != null) publish.put("priority", made.publish().priority());
        if (made.publish().expiration() != null) publish.put("expiration", made.publish().expiration());
        Object queues = made.declare().queues().stream()
            .map(one -> Map.of("name", one.name(), "arguments", one.arguments())).toList();
        Object bindings = made.declare().bindings().stream()
            .map(one -> Map.of(
                "source", one.source(),
                "destination", one.destination(),
                "destination_type", one.toQueue() ? "queue" : "exchange",
                "routing_key", one.routingKey()))
            .toList();
        equal(
            vector,
            List.of(vector.get("publish"), vector.get("waits_in"), vector.get("declare")),
            List.of(
                Map.of(
                    "exchange", made.publish().exchange(),
                    "routing_key", made.publish().routingKey(),
                    "properties", publish),
                made.waitsIn(),
                Map.of("queues", queues, "bindings", bindings)));
    }

    private static Wire.Delayed made(Map<String, Object> vector) {
        Map<String, Object> properties = object(vector.getOrDefault("properties", Map.of()));
        Number priority = (Number) properties.get("priority");
        return Wire.delayed(
            Wire.Target.of(object(vector.get("target"))),
            whole(vector.get("delay")),
            whole(vector.getOrDefault("now", 0)),
            (String) vector.getOrDefault("release", "3.10.8"),
            object(properties.getOrDefault("headers", Map.of())),
            priority == null ? null : priority.intValue(),
            (String) properties.get("expiration"));
    }

    private void checkRefused(Map<String, Object> vector) {
        try {
            made(vector);
        } catch (IllegalArgumentException expected) {
            count++;
            return;
        }
        throw new AssertionError(vector + " was not refused");
    }

    private void checkReceived(Map<String, Object> vector) {
        Map<String, Object> headers = object(vector.get("headers")), copy = new HashMap<>();
        copy.put("headers", Wire.copy(headers));
        for (String name : List.of("priority", "expiration")) {
            if (headers.containsKey("bide-" + name)) copy.put(name, headers.get("bide-" + name));
        }
        equal(vector, vector.get("copy"), copy);
        Wire.Received found = Wire.Received.of(headers);
        equal(vector, Arrays.asList(vector.get("due"), vector.get("key")), Arrays.asList(found.due(), found.key()));
        count--; // one vector, two comparisons
    }

    private void checkRecord(Map<String, Object> vector) throws Exception {
        Map<String, Object> operation = object(vector.get("operation")), append = object(vector.get("append"));
        Wire.Message message = null;
        if (operation.get("message") != null) {
            Map<String, Object> given = object(operation.get("message"));
            String body = given.get("body") instanceof String text
                ? text
                : ((String) object(given.get("body")).get("repeat")).repeat((int) whole(object(given.get("body")).get("times")));
            message = new Wire.Message(object(given.get("properties")), body.getBytes(StandardCharsets.UTF_8));
        }
        Wire.Record made = Wire.record(operation, message, whole(vector.get("now")));
        // Latin-1 has one character for each byte.
        String[] parts = new String(made.body(), StandardCharsets.ISO_8859_1).split("\n", 2);
        String head = new String(parts[0].getBytes(StandardCharsets.ISO_8859_1), StandardCharsets.UTF_8);
        byte[] tail = parts[1].getBytes(StandardCharsets.ISO_8859_1);
        String start = "{\"v\":" + " ".repeat((int) whole(append.get("spaces"))) + "1";
        Object end = append.get("tail") instanceof String
            ? HexFormat.of().formatHex(tail)
            : Map.of("sha256", HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(tail)));
        equal(
            vector,
            List.of(append.get("exchange"), append.get("routing_keys"), append.get("head"), start, append.get("tail")),
            List.of(
                made.exchange(), made.routingKeys(), Wire.JSON.fromJson(head, Object.class), head.substring(0, start.length()), end));
    }

    private void checkQuestion(Map<String, Object> vector) {
        Wire.Question made = Wire.question((String) vector.get("key"));
        Object body = Wire.JSON.fromJson(new String(made.body(), StandardCharsets.UTF_8), Object.class);
        byte[] answer = ((String) vector.get("answer")).getBytes(StandardCharsets.UTF_8);
        equal(
            vector,
            List.of(vector.get("publish"), vector.get("found")),
            List.of(
                Map.of("exchange", made.exchange(), "routing_key", made.routingKey(), "body", body), Wire.state(answer)));
    }

    private void equal(Object vector, Object expected, Object found) {
        if (!plain(expected).equals(plain(found))) {
            throw new AssertionError(vector + ": " + expected + " expected, " + found + " found");
        }
        count++;
    }

    /** The same value with whole numbers of one type. */
    private static Object plain(Object value) {
        if (value instanceof Number number) return number.longValue();
        if (value instanceof List<?> items) return items.stream().map(Vectors::plain).collect(Collectors.toList());
        if (value instanceof Map<?, ?> fields) {
            Map<Object, Object> plain = new HashMap<>();
            fields.forEach((name, one) -> plain.put(name, plain(one)));
            return plain;
        }
        return value;
    }

    private static long whole(Object value) {
        return ((Number) value).longValue();
    }

    private static Map<String, Object> object(Object value) {
        return Wire.fields(value);
    }

    private static List<?> list(Object value) {
        return (List<?>) value;
    }
}
