// Delays and schedules of bide: what to publish and what to declare. docs/wire-contract.md has the rules.

package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"regexp"
	"strconv"
	"strings"
)

const (
	base         = "bide.v1"
	resolution   = 10
	wordsAtApply = 4 // 'bide delay apply' binds the digits for routing keys of up to four words
	maxName      = 255
	partitions   = 8
	large        = 64_000
	spaces       = 4_096
)

type level struct {
	letter        string
	unit, highest int64
}

var levels = []level{
	{"e", 8_640_000_000, 31},
	{"d", 86_400_000, 99},
	{"h", 3_600_000, 23},
	{"m", 60_000, 59},
	{"s", 1_000, 59},
	{"c", 10, 99},
}

var (
	transportKey = regexp.MustCompile(`(?s)^(?:~\.)*~(?:[edhmsc][0-9]{1,2}(?:/[0-9]+)?|[qrxk][:#].*)$`)
	ofTheBroker  = regexp.MustCompile(
		`^(?:CC|BCC|x-death|x-(?:first|last)-death-(?:exchange|queue|reason)|x-delivery-count|x-acquired-count)$`)
)

type table = map[string]interface{}

// target is a queue, or an exchange with a routing key.
type target struct {
	Queue      *string `json:"queue"`
	Isolated   bool    `json:"isolated"`
	Exchange   string  `json:"exchange"`
	RoutingKey string  `json:"routing_key"`
}

// String returns the header bide-to.
func (t target) String() string {
	if t.Queue != nil {
		return "q:" + *t.Queue
	}
	return "x:" + t.Exchange
}

type properties struct {
	Headers    table  `json:"headers"`
	Priority   *uint8 `json:"priority,omitempty"`
	Expiration string `json:"expiration,omitempty"`
}

type publish struct {
	Exchange   string     `json:"exchange"`
	RoutingKey string     `json:"routing_key"`
	Properties properties `json:"properties"`
}

type queue struct {
	Name      string `json:"name"`
	Arguments table  `json:"arguments"`
}

type binding struct {
	Source          string `json:"source"`
	Destination     string `json:"destination"`
	DestinationType string `json:"destination_type"`
	RoutingKey      string `json:"routing_key"`
}

type declarations struct {
	Queues   []queue   `json:"queues"`
	Bindings []binding `json:"bindings"`
}

// A message as its sender gives it. Delay and Now are milliseconds; Release is the broker's, such as 3.10.8.
type message struct {
	Target     target     `json:"target"`
	Delay      int64      `json:"delay"`
	Now        int64      `json:"now"`
	Release    string     `json:"release"`
	Properties properties `json:"properties"`
}

type delayedMessage struct {
	Publish publish      `json:"publish"`
	WaitsIn []string     `json:"waits_in"`
	Declare declarations `json:"declare"`
}

// delayed returns what to publish and to declare for a message.
func delayed(m message) (delayedMessage, error) {
	if m.Delay < 0 {
		return delayedMessage{}, fmt.Errorf("the delay %d is negative", m.Delay)
	}
	var longest int64
	for _, one := range levels {
		longest += one.unit * one.highest
	}
	wait := (m.Delay + resolution - 1) / resolution * resolution
	if wait > longest {
		return delayedMessage{}, fmt.Errorf("the delay %d is longer than %d ms", m.Delay, longest)
	}
	if err := check(m.Target); err != nil {
		return delayedMessage{}, err
	}
	exchange, routingKey, padding := m.Target.Exchange, m.Target.RoutingKey, ""
	if m.Target.Queue != nil {
		exchange, routingKey = "", *m.Target.Queue
	} else {
		padding = strings.Repeat("~.", strings.Count(routingKey, "."))
	}
	sent := properties{Headers: table{"bide-sent": m.Now, "bide-due": m.Now + m.Delay}}
	for name, value := range m.Properties.Headers {
		sent.Headers[name] = value
	}
	if wait == 0 {
		sent.Priority, sent.Expiration = m.Properties.Priority, m.Properties.Expiration
		return delayedMessage{publish{exchange, routingKey, sent}, []string{}, declarations{[]queue{}, []binding{}}}, nil
	}
	targetKey := padding + keyOf(m.Target)
	var waitsIn []string
	var digits []binding
	var keys []interface{}
	entry := ""
	for place, one := range levels {
		digit := wait / one.unit
		wait %= one.unit
		if entry == "" && digit == 0 {
			continue
		}
		if entry == "" {
			entry = base + ".in." + one.letter
		}
		key := fmt.Sprintf("%s~%s%d", padding, one.letter, digit)
		keys = append(keys, key)
		if digit > 0 {
			name := fmt.Sprintf("%s.%s%d", base, one.letter, digit)
			waitsIn = append(waitsIn, name)
			digits = append(digits, binding{base + "." + one.letter, name, "queue", key})
			continue
		}
		below := "released"
		if place+1 < len(levels) {
			below = levels[place+1].letter
		}
		digits = append(digits, binding{base + "." + one.letter, base + "." + below, "exchange", key})
	}
	sent.Headers[carrier(m.Release)] = append(keys, targetKey)
	sent.Headers["bide-to"] = m.Target.String()
	// In a delay queue these two would act on the wait.
	if m.Properties.Priority != nil {
		sent.Headers["bide-priority"] = int32(*m.Properties.Priority)
	}
	if m.Properties.Expiration != "" {
		sent.Headers["bide-expiration"] = m.Properties.Expiration
	}
	declare, err := declarationsOf(m.Target, targetKey)
	if err != nil {
		return delayedMessage{}, err
	}
	if len(padding)/2 >= wordsAtApply {
		declare.Bindings = append(declare.Bindings, digits...)
	}
	return delayedMessage{publish{entry, routingKey, sent}, waitsIn, declare}, nil
}

// carrier returns the header for the keys. From 4.0 on the broker keeps BCC keys, and receivers do not see them.
func carrier(release string) string {
	if major, err := strconv.Atoi(strings.Split(release, ".")[0]); err == nil && major >= 4 {
		return "BCC"
	}
	return "CC"
}

func check(t target) error {
	name, key := t.Exchange, t.RoutingKey
	if t.Queue != nil {
		name, key = *t.Queue, *t.Queue
	}
	if name == "" {
		return fmt.Errorf("the target has no name")
	}
	if len(name) > maxName || len(key) > maxName {
		return fmt.Errorf("a name or key is longer than %d bytes", maxName)
	}
	if transportKey.MatchString(key) {
		return fmt.Errorf("%s has the form of a transport key", key)
	}
	return nil
}

func keyOf(t target) string {
	switch {
	case t.Queue == nil:
		return "~x:" + strings.NewReplacer("%", "%25", ".", "%2E").Replace(t.Exchange)
	case t.Isolated:
		return "~r:" + *t.Queue
	default:
		return "~q:" + *t.Queue
	}
}

// declarationsOf returns the binding of a target, and the release queue of exchanges and isolated queues.
func declarationsOf(t target, targetKey string) (declarations, error) {
	queues, destination := []queue{}, ""
	if t.Queue != nil && !t.Isolated {
		destination = *t.Queue
	} else {
		destination = base + ".release." + t.String()
		arguments := table{
			"x-queue-type":           "quorum",
			"x-message-ttl":          int32(0),
			"x-dead-letter-exchange": t.Exchange,
			"x-dead-letter-strategy": "at-least-once",
			"x-overflow":             "reject-publish",
			"x-queue-leader-locator": "balanced",
		}
		if t.Queue != nil {
			arguments["x-dead-letter-routing-key"] = *t.Queue
		}
		queues = append(queues, queue{destination, arguments})
	}
	if len(targetKey) > maxName || len(destination) > maxName {
		return declarations{}, fmt.Errorf("the key %s or the queue %s is longer than %d bytes", targetKey, destination, maxName)
	}
	return declarations{queues, []binding{{base + ".delivery", destination, "queue", targetKey}}}, nil
}

// waitOf returns what a message says about its wait: due time in milliseconds, and the key of its schedule; nil if it has
// none.
func waitOf(headers table) (due, key interface{}) {
	return headers["bide-due"], headers["bide-key"]
}

// copyOf returns the headers for a copy of a received message. Its priority and expiration are in bide-priority and
// bide-expiration.
func copyOf(headers table) table {
	copied := table{}
	for name, value := range headers {
		if !strings.HasPrefix(name, "bide-") && !ofTheBroker.MatchString(name) {
			copied[name] = value
		}
	}
	return copied
}

// An operation on schedules. Message is for the kind "schedule".
type operation struct {
	Kind      string            `json:"kind"`
	Request   string            `json:"request"`
	Key       *string           `json:"key"`
	Target    target            `json:"target"`
	Filter    *filter           `json:"filter"`
	Due       *int64            `json:"due"`
	At        *int64            `json:"at"`
	IfAbsent  bool              `json:"if_absent"`
	IfVersion string            `json:"if_version"`
	Interval  *int64            `json:"interval"`
	Message   *scheduledMessage `json:"-"`
}

type filter struct {
	Prefix    string  `json:"prefix"`
	Target    *target `json:"target"`
	DueFrom   *int64  `json:"due_from"`
	DueBefore *int64  `json:"due_before"`
}

type scheduledMessage struct {
	Properties table
	Body       []byte
}

type recordHead struct {
	V          int            `json:"v"`
	Kind       string         `json:"kind"`
	Request    string         `json:"request"`
	Key        *string        `json:"key,omitempty"`
	To         string         `json:"to,omitempty"`
	RoutingKey string         `json:"routing_key,omitempty"`
	Filter     *filterHead    `json:"filter,omitempty"`
	Nominal    *int64         `json:"nominal,omitempty"`
	Due        *int64         `json:"due,omitempty"`
	At         *int64         `json:"at,omitempty"`
	Every      *recurringHead `json:"every,omitempty"`
	IfAbsent   bool           `json:"if_absent,omitempty"`
	IfVersion  string         `json:"if_version,omitempty"`
	Message    []int          `json:"message,omitempty"`
}

type filterHead struct {
	Prefix    string `json:"prefix,omitempty"`
	To        string `json:"to,omitempty"`
	DueFrom   *int64 `json:"due_from,omitempty"`
	DueBefore *int64 `json:"due_before,omitempty"`
}

type recurringHead struct {
	Interval int64  `json:"interval"`
	Anchor   int64  `json:"anchor"`
	CatchUp  string `json:"catch_up"`
}

func partitionOf(key string) int {
	return int(crc32.ChecksumIEEE([]byte(key)) % partitions)
}

// recordOf returns the routing keys and the body of the record of an operation.
func recordOf(o operation, now int64) ([]string, []byte, error) {
	head := recordHead{
		V: 1, Kind: o.Kind, Request: o.Request, Key: o.Key, Due: o.Due, At: o.At, IfAbsent: o.IfAbsent, IfVersion: o.IfVersion,
	}
	var tail []byte
	if o.Message != nil {
		encoded, err := encodeProperties(o.Message.Properties)
		if err != nil {
			return nil, nil, err
		}
		head.To, head.RoutingKey, head.Nominal = o.Target.String(), o.Target.RoutingKey, o.Due
		head.Message = []int{len(encoded), len(o.Message.Body)}
		if o.Interval != nil {
			head.Every = &recurringHead{*o.Interval, now, "last"}
		}
		tail = append(encoded, o.Message.Body...)
	} else if o.Filter != nil {
		head.Filter = &filterHead{Prefix: o.Filter.Prefix, DueFrom: o.Filter.DueFrom, DueBefore: o.Filter.DueBefore}
		if o.Filter.Target != nil {
			head.Filter.To = o.Filter.Target.String()
		}
	}
	text, err := json.Marshal(head)
	if err != nil {
		return nil, nil, err
	}
	if len(text)+1+len(tail) >= large {
		// Gates add fields of their own to large messages, and the broker must accept the result as well.
		text = append([]byte(`{"v":`+strings.Repeat(" ", spaces)), text[5:]...)
	}
	var keys []string
	for one := 0; one < partitions; one++ {
		if o.Key == nil || partitionOf(*o.Key) == one {
			keys = append(keys, strconv.Itoa(one))
		}
	}
	return keys, append(append(text, '\n'), tail...), nil
}

// questionOf returns the routing key and the body of the question for what waits under a key.
func questionOf(key string) (string, []byte, error) {
	text, err := json.Marshal(struct {
		V   int    `json:"v"`
		Ask string `json:"ask"`
		Key string `json:"key"`
	}{1, "key", key})
	return fmt.Sprintf("queries.%d", partitionOf(key)), append(text, '\n'), err
}

type scheduleState struct {
	State   string `json:"state"`
	Due     int64  `json:"due,omitempty"`
	Version string `json:"version,omitempty"`
}

// stateOf returns what the answer to a question says. The messages behind its first line are left out.
func stateOf(body []byte) (scheduleState, error) {
	var decoded struct {
		V       int `json:"v"`
		Entries []struct {
			Is       string `json:"is"`
			Due      int64  `json:"due"`
			Version  string `json:"version"`
			IsPaused bool   `json:"is_paused"`
		} `json:"entries"`
	}
	head, _, _ := bytes.Cut(body, []byte("\n"))
	if err := json.Unmarshal(head, &decoded); err != nil {
		return scheduleState{}, err
	}
	if decoded.V != 1 {
		return scheduleState{}, fmt.Errorf("the version %d of an answer is unknown", decoded.V)
	}
	if len(decoded.Entries) == 0 {
		return scheduleState{State: "none"}, nil
	}
	first := decoded.Entries[0] // what waits comes before what is under way
	if first.IsPaused {
		first.Is = "paused"
	}
	return scheduleState{first.Is, first.Due, first.Version}, nil
}

// The properties in the order of an AMQP 0-9-1 content header. Their flags begin with the highest bit.
var propertyNames = []string{
	"content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id", "reply_to", "expiration",
	"message_id", "timestamp", "type", "user_id", "app_id",
}

func encodeProperties(given table) ([]byte, error) {
	var flags uint16
	var list bytes.Buffer
	known := 0
	for place, name := range propertyNames {
		value, isThere := given[name]
		if !isThere {
			continue
		}
		known++
		flags |= 0x8000 >> place
		switch name {
		case "headers":
			encoded, err := encodeTable(value.(table))
			if err != nil {
				return nil, err
			}
			writeLong(&list, encoded)
		case "delivery_mode", "priority":
			list.WriteByte(byte(value.(int64)))
		case "timestamp":
			binary.Write(&list, binary.BigEndian, value.(int64))
		default:
			if err := writeShort(&list, value.(string)); err != nil {
				return nil, err
			}
		}
	}
	if known < len(given) {
		return nil, fmt.Errorf("%v has a name that is not a property of a message", given)
	}
	return append([]byte{byte(flags >> 8), byte(flags)}, list.Bytes()...), nil
}

func encodeTable(headers table) ([]byte, error) {
	var encoded bytes.Buffer
	for _, name := range sortedNames(headers) {
		if err := writeShort(&encoded, name); err != nil {
			return nil, err
		}
		switch value := headers[name].(type) {
		case string:
			encoded.WriteByte('S')
			writeLong(&encoded, []byte(value))
		case int64:
			if value == int64(int32(value)) {
				encoded.WriteByte('I')
				binary.Write(&encoded, binary.BigEndian, int32(value))
			} else {
				encoded.WriteByte('l')
				binary.Write(&encoded, binary.BigEndian, value)
			}
		default:
			return nil, fmt.Errorf("the header %s is neither text nor a whole number", name)
		}
	}
	return encoded.Bytes(), nil
}

func writeShort(to *bytes.Buffer, text string) error {
	if len(text) > maxName {
		return fmt.Errorf("%s is longer than %d bytes", text, maxName)
	}
	to.WriteByte(byte(len(text)))
	to.WriteString(text)
	return nil
}

func writeLong(to *bytes.Buffer, value []byte) {
	binary.Write(to, binary.BigEndian, uint32(len(value)))
	to.Write(value)
}
