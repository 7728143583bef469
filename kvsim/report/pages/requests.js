"use strict";
// The table of requests: search, filter, sort; a click opens the story of a request.
(() => {
  const STEP = 25;
  const place = document.querySelector("#explorer > .scroll");
  const [search, choice] = document.querySelectorAll("#explorer input, #explorer select");
  const shown = document.getElementById("requests-shown");
  const state = { sort: "e2el", down: true, limit: STEP, open: null };
  let data;
  let rows;
  let longest;

  const unpack = async () => {
    const { packed } = JSON.parse(document.getElementById("requests-data").textContent);
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    data = JSON.parse(await new Response(stream).text());
    rows = data.id.map((_, i) => i);
    longest = Math.max(1, ...rows.map(e2el));
  };

  const e2el = (i) => (data.status[i] === "completed" ? data.finish[i] - data.arrival[i] : -1);
  const ttft = (i) => (data.first_token[i] < 0 ? -1 : data.first_token[i] - data.arrival[i]);
  const tpot = (i) => {
    const gaps = data.output_tokens[i] - 1;
    return e2el(i) < 0 || gaps < 1 ? -1 : (data.finish[i] - data.first_token[i]) / gaps;
  };

  const count = (value) => value.toLocaleString("en");
  const three = (value) => value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);
  const time = (us) => {
    if (us < 0) return "–";
    if (us >= 120e6) return `${Math.floor(us / 60e6)} min ${Math.floor(us / 1e6) % 60} s`;
    if (us >= 1e6) return `${three(us / 1e6)} s`;
    if (us >= 1e3) return `${three(us / 1e3)} ms`;
    return us ? `${us} µs` : "0 s";
  };

  const make = (tag, attributes, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };

  const columns = [
    ["id", "Request", (i) => data.id[i], (i) => make("span", { class: "id" }, data.id[i])],
    ["parts", "Where its time went", null, (i) => strip(i, longest)],
    ["e2el", "E2EL", e2el, (i) => (data.status[i] === "completed" ? time(e2el(i)) : data.status[i])],
    ["ttft", "TTFT", ttft, (i) => time(ttft(i))],
    ["tpot", "TPOT", tpot, (i) => time(tpot(i))],
    ["prompt", "Prompt", (i) => data.input_length[i], (i) => count(data.input_length[i])],
    ["output", "Output", (i) => data.output_tokens[i], (i) => count(data.output_tokens[i])],
    ["lost", "Preemptions", (i) => data.num_preemptions[i], (i) => count(data.num_preemptions[i])],
    ["arrival", "Arrived at", (i) => data.arrival[i], (i) => `${(data.arrival[i] / 1e6).toFixed(1)} s`],
  ];

  const strip = (i, whole) => {
    const bar = make("div", { class: "strip" });
    for (const [name, values] of Object.entries(data.parts)) {
      if (!values[i]) continue;
      const style = `--colour: var(--part-${name}); width: ${(100 * values[i]) / whole}%`;
      bar.append(make("span", { style, title: `${data.labels[name]}: ${time(values[i])}` }));
    }
    return bar;
  };

  const kept = (i) => {
    if (!data.id[i].toLowerCase().includes(search.value.trim().toLowerCase())) return false;
    if (choice.value === "completed") return data.status[i] === "completed";
    if (choice.value === "failed") return data.status[i] !== "completed";
    if (choice.value === "preempted") return data.num_preemptions[i] > 0;
    if (choice.value === "missed") return data.status[i] === "completed" && !data.good[i];
    return true;
  };

  const story = (i) => {
    const whole = Object.values(data.parts).reduce((sum, values) => sum + values[i], 0);
    const hits = data.num_cached_tokens[i] ? ` (${count(data.num_cached_tokens[i])} hit)` : "";
    const about = `${count(data.input_length[i])} prompt tokens${hits}, ${count(data.output_tokens[i])} output tokens`;
    const moments = [
      ["arrived", data.arrival[i]],
      ["first step", data.first_scheduled[i]],
      ["first token", data.first_token[i]],
      [data.status[i] === "completed" ? "finished" : `${data.status[i]}: ${data.reason[i]}`, data.finish[i]],
    ].filter(([, at]) => at >= 0);
    const parts = Object.entries(data.parts)
      .filter(([, values]) => values[i])
      .sort(([, a], [, b]) => b[i] - a[i]);
    const lines = (pairs) => {
      const body = pairs.map((cells) =>
        make("tr", {}, ...cells.map((cell, n) => make("td", n ? { class: "number" } : {}, cell))),
      );
      return make("table", {}, make("tbody", {}, ...body));
    };
    const swatch = (name) => make("span", { class: "swatch", style: `--colour: var(--part-${name})` });
    const ledger = parts.map(([name, values]) => [
      make("span", { class: "entry" }, swatch(name), data.labels[name]),
      time(values[i]),
      `${((100 * values[i]) / whole).toFixed(1)} %`,
    ]);
    const told = moments.map(([what, at]) => [what, time(at), `+${time(at - data.arrival[i])}`]);
    return make(
      "div",
      { class: "story" },
      make("p", {}, `${about}. Moment by moment: `, make("code", {}, `kvsim why DIR --request ${data.id[i]}`)),
      strip(i, whole || 1),
      make("div", { class: "duo" }, lines(told), lines(ledger)),
    );
  };

  const render = () => {
    const of = columns.find(([name]) => name === state.sort)[2];
    const order = rows.filter(kept).sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      return (x < y ? -1 : x > y ? 1 : 0) * (state.down ? -1 : 1) || data.index[a] - data.index[b];
    });
    const head = columns.map(([name, title, value], n) => {
      const mark = name === state.sort ? (state.down ? " ↓" : " ↑") : "";
      const label = value ? make("button", { type: "button", "data-sort": name }, title + mark) : title;
      return make("th", n > 1 ? { class: "number" } : {}, label);
    });
    const listed = order.slice(0, state.limit);
    if (state.open !== null && order.includes(state.open) && !listed.includes(state.open)) {
      listed.unshift(state.open);
    }
    const body = listed.flatMap((i) => {
      const open = i === state.open;
      const cells = columns.map(([, , , cell], n) => make("td", n > 1 ? { class: "number" } : {}, cell(i)));
      const row = make("tr", { "data-row": i, tabindex: 0, "aria-expanded": open }, ...cells);
      return open ? [row, make("tr", {}, make("td", { colspan: columns.length }, story(i)))] : [row];
    });
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
    const rest = order.length - state.limit;
    const more = make("button", { type: "button", class: "more" }, `${count(Math.min(rest, 100))} more`);
    place.replaceChildren(table, ...(rest > 0 ? [more] : []));
    shown.textContent = `${count(order.length)} of ${count(rows.length)}`;
  };

  const open = (i) => {
    state.open = state.open === i ? null : i;
    render();
  };

  const start = async () => {
    await unpack();
    render();
    for (const control of [search, choice]) {
      control.addEventListener("input", () => {
        state.limit = STEP;
        render();
      });
    }
    place.addEventListener("click", ({ target }) => {
      const heading = target.closest("button[data-sort]");
      const row = target.closest("tr[data-row]");
      if (heading) {
        const { sort } = heading.dataset;
        state.down = state.sort === sort ? !state.down : sort !== "id";
        state.sort = sort;
        render();
      } else if (target.closest(".more")) {
        state.limit += 100;
        render();
      } else if (row) open(Number(row.dataset.row));
    });
    place.addEventListener("keydown", ({ key, target }) => {
      if (key === "Enter" && target.dataset.row) open(Number(target.dataset.row));
    });
    // A request that was clicked in a chart, by its index.
    document.addEventListener("request", ({ detail }) => {
      const i = data.index.indexOf(detail);
      if (i < 0) return;
      [search.value, choice.value, state.open] = ["", "", i];
      render();
      place.querySelector(`tr[data-row="${i}"]`).scrollIntoView({ block: "center" });
    });
    document.getElementById("explorer").dataset.ready = "true";
  };
  start().catch((error) => {
    place.textContent = "The table needs a browser of 2023 or later.";
    throw error;
  });
})();
