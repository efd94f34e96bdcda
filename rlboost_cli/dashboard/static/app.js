"use strict";
// The page of a run: figures come from the #data element of a report, or by server-sent events from `rlboost dashboard`.
(() => {
  const { html, render, Component, useState, useEffect, useRef, useMemo } = htmPreact;
  const frozen = document.getElementById("data");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // --- words ---------------------------------------------------------------------------------------------
  const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
  function number(x, digits = 3) {
    if (!isNumber(x)) return "-";
    if (x !== 0 && Math.abs(x) < 1e-3) return Number(x.toPrecision(digits)).toExponential();
    return Number(x.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
  }
  function tickLabels(ticks) { // with digits enough to tell neighbours apart
    const known = ticks.filter((t) => isNumber(t) && t !== 0), gap = Math.abs(ticks[1] - ticks[0]);
    const digits = known.length && gap ? Math.ceil(Math.log10(Math.max(...known.map(Math.abs)) / gap)) + 1 : 3;
    return ticks.map((t) => number(t, Math.min(Math.max(digits, 3), 12)));
  }
  const whole = (x) => (isNumber(x) ? Math.round(x).toLocaleString("en") : "-");
  const usd = (x) => (isNumber(x) ? "$" + x.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) : "-");
  const share = (x) => (isNumber(x) ? (100 * x).toFixed(0) + " %" : "-");
  const clock = (at) => (isNumber(at) ? new Date(at * 1000).toLocaleTimeString("en-GB") : "");
  function duration(s) {
    if (!isNumber(s)) return "-";
    if (s < 100) return s.toFixed(s < 10 ? 1 : 0) + " s";
    return s < 6000 ? (s / 60).toFixed(0) + " min" : (s / 3600).toFixed(1) + " h";
  }

  // --- pieces --------------------------------------------------------------------------------------------
  const Tile = ({ name, value, note }) => html`<div class="tile"><span>${name}</span><b>${value}</b><span>${note}</span></div>`;
  const Key = ({ color, text }) => html`<span class="key"><i style=${{ background: `var(${color})` }}></i>${text}</span>`;
  const Section = ({ title, children }) => html`<section aria-label=${title}><h2>${title}</h2>${children}</section>`;
  const Scroll = ({ label, children }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>${children}</div>`;

  const yRange = (_, least, most) => least === most ? [Math.min(0, least ?? 0), Math.max(0, most ?? 0) || 1] : uPlot.rangeNum(least, most, 0.1, true);
  function Chart({ title, about, x, lines, unit }) {
    const box = useRef(null), plot = useRef(null);
    const theme = useTheme();
    useEffect(() => {
      const make = () => {
        plot.current?.destroy();
        const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
        plot.current = new uPlot({
          width: Math.max(200, box.current.clientWidth), height: 190, scales: { x: { time: false }, y: { range: yRange } },
          series: [{ label: "step" }, ...lines.map((line) => ({ label: line.name, stroke: css(line.color), width: 1.5, spanGaps: true,
            points: { show: x.length < 40 }, value: (_, v) => number(v, 4) }))],
          axes: [axis, { ...axis, size: 72, values: (_, ticks) => tickLabels(ticks) }],
        }, [x, ...lines.map((line) => line.values)], box.current);
      };
      make();
      const watch = new ResizeObserver(() => plot.current?.setSize({ width: Math.max(200, box.current.clientWidth), height: 190 }));
      watch.observe(box.current);
      return () => { watch.disconnect(); plot.current?.destroy(); plot.current = null; };
    }, [theme, lines.length, title]);
    useEffect(() => plot.current?.setData([x, ...lines.map((line) => line.values)]), [x, lines]);
    const last = lines.map((line) => `${line.name} ${number(line.values.filter(isNumber).at(-1))}`).join(", ");
    return html`<figure><figcaption><b>${title}</b>${unit ? ` (${unit})` : ""} ${about}</figcaption>
      <div ref=${box} role="img" aria-label=${`${title} over ${x.length} steps; last: ${last}`}></div></figure>`;
  }

  const listeners = new Set();
  function useTheme() {
    const [, redraw] = useState(0);
    useEffect(() => { const f = () => redraw((n) => n + 1); listeners.add(f); return () => listeners.delete(f); }, []);
    return (document.documentElement.dataset.theme || "") + matchMedia("(prefers-color-scheme: dark)").matches;
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => listeners.forEach((f) => f()));
  function toggleTheme() {
    const isDark = (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    document.documentElement.dataset.theme = isDark ? "light" : "dark";
    listeners.forEach((f) => f());
  }

  // --- sections ------------------------------------------------------------------------------------------
  function Head({ data, connection }) {
    const { status } = data;
    const outcome = status.outcome || {};
    return html`<header><h1>${data.run}</h1><span class=${`state ${status.state}`}>${status.state}</span>
      <span class="dim">${connection || (frozen ? `report of ${new Date(data.at * 1000).toLocaleString("en-GB")}` : data.has_ended ? "" : "live")}</span>
      <span class="grow"></span>${!frozen && html`<a href="/">All runs</a>`}
      <button type="button" onClick=${toggleTheme}>Light or dark</button></header>
      ${outcome.problem && html`<section role="alert" class=${status.state === "failed" ? "failed" : "warning"}>${outcome.problem}${outcome.remedy ? `; ${outcome.remedy}` : ""}</section>`}
      ${!outcome.problem && data.problem && html`<section role="status" class="warning">${data.problem}</section>`}`;
  }

  function Tiles({ data }) {
    const { status, cost } = data, { serving } = status, rewards = (status.reward_history || []).filter(isNumber);
    const lost = status.preemptions ? status.preemptions.noticed + status.preemptions.silent + status.preemptions.reset : 0;
    const other = cost.counterfactual, saving = other.saving_fraction;
    const spent = status.started_at && status.at ? status.at - status.started_at : null;
    const from = status.ancestors?.[0], own = status.step - (from ? Number(from.split("@")[1]) : 0);
    const left = !data.has_ended && own > 1 && status.steps ? (spent / own) * (status.steps - status.step) : null;
    return html`<div class="tiles">
      ${serving ? html`<${Tile} name="Requests answered" value=${whole(serving.finished)}
        note=${`in ${duration(spent)}${data.has_ended ? "" : `; ${whole(serving.open)} open${serving.waiting ? `, ${whole(serving.waiting)} wait for an engine, the longest ${duration(serving.longest_wait_s)}` : ""}; the load wants ${whole(serving.wanted_instances)} spot instance${serving.wanted_instances === 1 ? "" : "s"}`}`} />` : html`
      <${Tile} name="Step" value=${`${status.step} / ${status.steps ?? "-"}`}
        note=${`${duration(spent)}${left ? `, about ${duration(left)} left` : ""}; policy version ${status.policy_version ?? "-"}${from ? `; forked from ${status.ancestors.join(", from ")}` : ""}`} />
      <${Tile} name="Mean reward" value=${number(status.reward_mean)} note=${rewards.length ? `first step ${number(rewards[0])}` : ""} />`}
      ${(status.evaluations || []).map((each) => html`<${Tile} key=${each.name} name=${`Evaluation ${each.name}`} value=${number(each.values.reward_mean)}
        note=${[`reward; first ${number(each.first.reward_mean)}; after ${each.updates} updates`, ...Object.keys(each.values)
          .filter((name) => name.includes("_at_")).map((name) => `${name.replace("_at_", "@")} ${number(each.values[name])}`)].join(", ")} />`)}
      <${Tile} name="Throughput" value=${whole(!data.has_ended ? status.tokens_per_s : serving ? serving.tokens / spent : mean(data.metrics.values.tokens_per_s))}
        note=${!data.has_ended ? "tokens/s generated now" : serving ? "tokens/s served, mean of the run" : "tokens/s trained, mean of the steps"} />
      <${Tile} name="Spent" value=${usd(cost.total_usd)} note=${data.has_ended ? `on ${cost.machines.length} machine${cost.machines.length === 1 ? "" : "s"}` : `${usd(cost.rate_usd_per_hour)} per hour now`} />
      <${Tile} name=${serving ? "Per million tokens served" : "Per million tokens"} value=${usd(cost.usd_per_million_tokens)}
        note=${isNumber(other.usd_per_million_tokens) && isNumber(saving) ? `steps ${usd(other.usd_per_million_tokens * (1 - saving))}, on demand ${usd(other.usd_per_million_tokens)} (${other.basis.split(/[,:;]/)[0]}): ${saving >= 0 ? `${share(saving)} saved` : `spot cost ${share(-saving)} more`}` : ""} />
      <${Tile} name="Preemptions survived" value=${whole(lost)} note=${`${whole(status.preemptions?.noticed)} with notice`} />
      ${serving ? html`<${Tile} name="Responses migrated" value=${whole(status.responses?.migrated)} note=${`${whole(status.responses?.in_flight)} in flight, ${whole(status.responses?.rebalanced)} rebalanced`} />` : html`
      <${Tile} name="Responses" value=${whole(status.responses?.finished)}
        note=${`${whole(status.responses?.in_flight)} in flight, ${whole(status.responses?.migrated)} migrated, ${whole(status.responses?.rebalanced)} rebalanced`} />`}
      <${Tile} name="Tokens" value=${whole(serving ? serving.tokens : status.tokens?.trained)}
        note=${`${serving ? "served" : "trained"}; ${!serving && cost.requests_served ? `${whole(cost.tokens_served)} more served in ${whole(cost.requests_served)} requests; ` : ""}${whole(status.tokens?.migrated)} carried over to another machine, about ${whole(status.tokens?.lost_estimate)} lost`} />
    </div>`;
  }
  const mean = (values) => { const known = (values || []).filter(isNumber); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };

  const Warnings = ({ warnings }) => warnings?.length ? html`<${Section} title="Warnings"><ul>${warnings.map((each) =>
    html`<li key=${each.code}><b class="warning">${each.text}</b> ${each.reason} ${each.advice}</li>`)}</ul><//>` : null;

  function Curves({ data }) {
    const { steps, values, about, important } = data.metrics;
    const [name, setName] = useState("");
    const [by, setBy] = useState("steps");
    const others = Object.keys(values).filter((each) => each !== "step");
    const x = useMemo(() => axisOf(data, by), [data.metrics, data.cost, by]);
    if (!steps.length) return html`<${Section} title="Curves"><p class="dim">No step is trained yet.</p><//>`;
    const shown = [...new Set([...important, "tokens_per_s", ...(name ? [name] : [])])].filter((each) => each in values);
    const rows = [];
    for (const each of shown) {
      if (each === "eval_reward_mean" && shown.includes("reward_mean")) continue;
      const lines = [{ name: each, values: values[each], color: "--accent" }];
      if (each === "reward_mean" && values.eval_reward_mean) lines.push({ name: "eval_reward_mean", values: values.eval_reward_mean, color: "--spot" });
      rows.push(html`<${Chart} key=${each + by} title=${each} about=${about[each].meaning} unit=${about[each].unit} x=${x} lines=${lines} />`);
    }
    const perStep = new Map(data.cost.steps.map((step) => [step.step + 1, step]));
    rows.push(html`<${Chart} key=${"usd" + by} title="usd_per_step" unit="$" about="What was spent since the step before." x=${x}
      lines=${[{ name: "usd", values: steps.map((step) => perStep.get(step)?.usd ?? null), color: "--reserved" }]} />`);
    return html`<${Section} title="Curves"><div class="row">
      <label>Over <select value=${by} onChange=${(e) => setBy(e.target.value)}><option value="steps">steps</option><option value="tokens">million tokens</option>
        <option value="hours">hours</option><option value="usd">dollars</option></select></label>
      <label>Another metric <select value=${name} onChange=${(e) => setName(e.target.value)}><option value="">-</option>
        ${others.map((each) => html`<option value=${each} key=${each}>${each}</option>`)}</select></label></div>
      <div class="charts">${rows}</div><//>`;
  }
  function axisOf(data, by) {
    if (by === "steps") return data.metrics.steps;
    const rows = new Map(data.cost.steps.map((step) => [step.step + 1, step]));
    let sum = by === "usd" ? data.cost.outside_steps_usd.before : 0;
    return data.metrics.steps.map((step) => {
      const row = rows.get(step);
      if (row) sum += by === "usd" ? row.restart_usd + row.usd : by === "tokens" ? row.tokens / 1e6 : row.seconds / 3600;
      return sum;
    });
  }

  const PHASES = [["rollout_wait_s", "waiting for rollouts", "--spot"], ["train_wait_s", "waiting, GPUs held", "--warn"], ["reward_wait_s", "waiting for rewards", "--bad"],
    ["train_s", "training", "--accent"], ["lease_wait_s", "waiting for engines to free GPUs", "--boot"], ["handover_s", "moving onto GPUs", "--reserved"],
    ["handover_asleep_s", "moving off GPUs", "--reserved"], ["publish_s", "publishing weights", "--text"], ["checkpoint_s", "copying checkpoint", "--dim"]];
  function StepSeconds({ metrics }) {
    const known = PHASES.filter(([name]) => metrics.values[name]?.some((v) => v > 0));
    const newest = metrics.steps.length > 200 ? metrics.steps.length - 200 : 0;
    const steps = metrics.steps.slice(newest), count = steps.length;
    if (!count || !known.length) return null;
    const totals = steps.map((_, i) => Math.max(metrics.values.step_s?.[newest + i] || 0, known.reduce((sum, [name]) => sum + (metrics.values[name][newest + i] || 0), 0)));
    const most = Math.max(...totals), width = 1000 / count;
    const bars = steps.map((step, i) => {
      let from = 0;
      return known.map(([name, words, color]) => {
        const s = metrics.values[name][newest + i] || 0, y = 140 - (140 * (from + s)) / most, h = (140 * s) / most;
        from += s;
        return s > 0 && html`<rect key=${name} x=${i * width} y=${y} width=${Math.max(0.5, width * 0.9)} height=${h} style=${{ fill: `var(${color})` }}><title>step ${step}: ${words} ${duration(s)}</title></rect>`;
      });
    });
    return html`<${Section} title="Where a step's seconds go"><svg viewBox="0 0 1000 140" preserveAspectRatio="none" height="140" role="img"
      aria-label=${`Seconds of ${count} steps by what the trainer did; longest step ${duration(most)}`}>${bars}</svg>
      <div class="row">${known.map(([name, words, color]) => html`<${Key} key=${name} color=${color} text=${`${words} ${duration(mean(metrics.values[name]))}`} />`)}
      <span class="dim">means of the steps; tallest bar ${duration(most)}</span></div><//>`;
  }

  function Fleet({ data }) {
    const more = new Map(data.machines.map((machine) => [machine.id, machine]));
    const machines = data.cost.machines.filter((machine) => isNumber(machine.started_at));
    if (!machines.length) return html`<${Section} title="Machines"><p class="dim">No machine is running yet.</p><//>`;
    const from = Math.min(...machines.map((m) => m.started_at)), to = Math.max(from + 1, data.has_ended ? Math.max(...machines.map((m) => m.ended_at || data.cost.as_of)) : data.cost.as_of);
    const at = (t) => (1000 * (t - from)) / (to - from), high = machines.length > 60 ? 6 : 14;
    const bars = machines.map((m, i) => {
      const end = m.ended_at || to, boot = more.get(m.id)?.boot_s, detail = more.get(m.id)?.detail;
      const ready = m.pool === "reserved" ? m.started_at : isNumber(boot) ? Math.min(end, m.started_at + boot) : end, y = i * high;
      const title = `${m.id}, ${m.zone}, ${usd(m.price_usd_per_hour)}/h: ${duration(end - m.started_at)}, ${usd(m.cost_usd)}${m.ended_at ? `, ${detail || m.state}` : ""}`;
      return html`<g key=${m.id}><title>${title}</title>
        <rect x=${at(m.started_at)} y=${y + 1} width=${Math.max(1, at(ready) - at(m.started_at))} height=${high - 2} style=${{ fill: "var(--boot)" }} />
        <rect x=${at(ready)} y=${y + 1} width=${Math.max(0, at(end) - at(ready))} height=${high - 2} style=${{ fill: m.pool === "reserved" ? "var(--reserved)" : "var(--spot)" }} /></g>`;
    });
    return html`<${Section} title="Machines"><div class="row"><${Key} color="--reserved" text="reserved" /><${Key} color="--spot" text="spot, serving" />
      <${Key} color="--boot" text="starting" /><span class="dim">${clock(from)} to ${clock(to)}, ${duration(to - from)}; point at a bar for its story</span></div>
      <${Scroll} label="Timeline of machines"><svg viewBox=${`0 0 1000 ${machines.length * high}`} preserveAspectRatio="none" height=${machines.length * high}
        role="img" aria-label=${`Timeline of ${machines.length} machines; the table below has the same`}>${bars}</svg><//>
      <details><summary>Table of machines</summary><${Scroll} label="Table of machines"><table><thead><tr><th scope="col">Machine</th><th scope="col">Where</th><th scope="col">GPU</th>
        <th scope="col" class="num">$/h</th><th scope="col">From</th><th scope="col">To</th><th scope="col" class="num">Start-up</th><th scope="col" class="num">Cost</th><th scope="col" class="num">Useful</th><th scope="col">State</th></tr></thead>
      <tbody>${data.cost.machines.map((m) => html`<tr key=${m.id}><td>${m.id}</td><td>${m.provider} ${m.zone}</td><td>${m.accelerator}</td><td class="num">${number(m.price_usd_per_hour, 4)}</td>
        <td>${clock(m.started_at)}</td><td>${clock(m.ended_at)}</td><td class="num">${duration(more.get(m.id)?.boot_s)}</td><td class="num">${usd(m.cost_usd)}</td><td class="num">${usd(m.useful_usd)}</td>
        <td>${m.ended_at ? more.get(m.id)?.detail || m.state : m.state}</td></tr>`)}</tbody></table><//></details><//>`;
  }

  function Bill({ cost }) {
    const rows = [...Object.entries(cost.compute_usd).map(([name, usd]) => [`${name} machines`, usd]), ...Object.entries(cost.other_usd)];
    const uses = [["useful", cost.useful_usd], ...Object.entries(cost.wasted_usd)];
    const Table = ({ title, rows, of }) => html`<table><thead><tr><th scope="col">${title}</th><th scope="col" class="num">$</th><th scope="col" class="num">share</th></tr></thead>
      <tbody>${rows.map(([name, amount]) => html`<tr key=${name}><td>${name}</td><td class="num">${usd(amount)}</td><td class="num">${share(of ? amount / of : null)}</td></tr>`)}</tbody></table>`;
    return html`<${Section} title="Bill"><div class="charts"><${Table} title="What was bought" rows=${rows} of=${cost.total_usd} />
      <${Table} title="What machine time was good for" rows=${uses} of=${uses.reduce((sum, [, amount]) => sum + amount, 0)} /></div>
      <p class="dim">On demand only: ${cost.counterfactual.basis}</p>${cost.notes.map((note) => html`<p class="dim" key=${note}>${note}</p>`)}<//>`;
  }

  function WhatIf({ found }) {
    if (!found?.options?.length) return found?.problem ? html`<${Section} title="With other machines"><p class="dim">${found.problem}</p><//>` : null;
    return html`<${Section} title="With other machines (simulated)"><${Scroll} label="Table of simulated options"><table><thead><tr><th scope="col">The whole job</th><th scope="col" class="num">takes</th>
      <th scope="col" class="num">costs</th><th scope="col" class="num">$ per M tokens</th></tr></thead><tbody>${found.options.map((each) => html`<tr key=${each.what}><td>${each.is_job ? html`<b>${each.what}</b>` : each.what}</td>
      <td class="num">${duration(each.hours * 3600)}</td><td class="num">${usd(each.usd)}</td><td class="num">${usd(each.usd_per_million_tokens)}</td></tr>`)}</tbody></table><//><p class="dim">${found.basis}; simulated at step ${found.step}.</p><//>`;
  }

  function Samples({ data }) {
    const [text, setText] = useState(""), [found, setFound] = useState(data.samples || []), [problem, setProblem] = useState("");
    const step = data.status.step;
    useEffect(() => {
      if (frozen) {
        const wanted = text.toLowerCase();
        setFound(data.samples.filter((each) => !wanted || (each.prompt + "\n" + each.response).toLowerCase().includes(wanted)));
        return undefined;
      }
      const stop = new AbortController();
      const wait = setTimeout(() => fetch(`samples?text=${encodeURIComponent(text)}`, { signal: stop.signal }).then((answer) => answer.json())
        .then((rows) => { setFound(rows); setProblem(""); }, (error) => error.name === "AbortError" || setProblem("The samples cannot be read now.")), 200);
      return () => { clearTimeout(wait); stop.abort(); };
    }, [text, step]);
    const newest = found.slice(-60).reverse();
    return html`<${Section} title="Samples"><div class="row"><label class="grow">Search in prompts and responses <input type="search" value=${text} onInput=${(e) => setText(e.target.value)} /></label>
      <span class="dim" role="status">${problem || `${found.length} found, newest ${newest.length} shown`}</span></div>
      <${Scroll} label="List of samples">${newest.map((each, i) => html`<div class="sample" key=${each.step + "/" + i}><span class="dim">step ${each.step}, reward ${number(each.reward)}, ${whole(each.tokens)} tokens${each.finish_reason === "length" ? ", truncated" : ""}</span>
        <pre>${each.prompt}</pre><pre>${each.response}</pre></div>`)}<//><//>`;
  }

  function Events({ events }) {
    const [text, setText] = useState("");
    const found = events.filter((each) => each.text.toLowerCase().includes(text.toLowerCase())).slice(-300).reverse();
    return html`<${Section} title="Events"><div class="row"><label class="grow">Filter <input type="search" value=${text} onInput=${(e) => setText(e.target.value)} /></label></div>
      <${Scroll} label="List of events"><table><tbody>${found.map((each, i) => html`<tr key=${each.at + "/" + i}><td class="dim">${clock(each.at)}</td><td class="wrap">${each.text}</td></tr>`)}</tbody></table><//><//>`;
  }

  function Logs() {
    const [names, setNames] = useState([]), [name, setName] = useState(""), [lines, setLines] = useState("");
    useEffect(() => { fetch("logs").then((answer) => answer.json()).then(setNames, () => {}); }, []);
    useEffect(() => {
      if (!name) return undefined;
      const read = () => fetch(`logs?name=${encodeURIComponent(name)}`).then((answer) => answer.json()).then((all) => setLines(all.join("\n")), () => {});
      read();
      const timer = setInterval(read, 2000);
      return () => clearInterval(timer);
    }, [name]);
    return html`<${Section} title="Logs"><div class="row"><label>Process or machine <select value=${name} onChange=${(e) => setName(e.target.value)}><option value="">-</option>
      ${names.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label></div>
      ${name && html`<${Scroll} label="Log"><pre>${lines || "empty"}</pre><//>`}<//>`;
  }

  function Page() {
    const [data, setData] = useState(frozen ? JSON.parse(frozen.textContent) : null), [connection, setConnection] = useState("");
    useEffect(() => {
      if (frozen) return undefined;
      const source = new EventSource("events");
      source.onmessage = (message) => { setConnection(""); setData((former) => ({ ...former, ...JSON.parse(message.data) })); };
      source.onerror = () => setConnection("no connection to rlboost dashboard; trying again");
      return () => source.close();
    }, []);
    const serving = data?.status.serving;
    useEffect(() => { if (data) document.title = `${data.run}: ${data.status.state}, ${serving ? `${whole(serving.finished)} requests answered` : `step ${data.status.step}`}`; }, [data?.status]);
    if (!data) return html`<main><p role="status">${connection || "Loading ..."}</p></main>`;
    return html`<main><${Head} data=${data} connection=${connection} /><${Warnings} warnings=${data.status.warnings} /><${Tiles} data=${data} />${!serving && html`<${Curves} data=${data} />`}
      <${StepSeconds} metrics=${data.metrics} /><${Fleet} data=${data} /><${Bill} cost=${data.cost} /><${WhatIf} found=${data.what_if} />${!serving && html`<${Samples} data=${data} />`}<${Events} events=${data.events} />
      ${!frozen && html`<${Logs} />`}<footer class="dim">RLBoost ${data.version}. Prices of local machines are illustrative.</footer></main>`;
  }

  const LINES = ["--accent", "--spot", "--reserved", "--boot", "--warn", "--bad", "--text", "--dim"];
  const AXES = { steps: "steps", tokens: "tokens", seconds: "seconds", usd: "dollars" };
  const POINTS = { steps: (x) => `step ${whole(x)}`, tokens: (x) => `${whole(x)} tokens`, seconds: duration, usd };
  const withError = (mean, error) => isNumber(error) ? `${number(mean)} ± ${number(error)}` : "-";
  function Comparison() {
    const [chosen, setChosen] = useState(new URLSearchParams(location.search).getAll("run"));
    const [{ names, found }, setData] = useState({ names: [], found: null }), [by, setBy] = useState("steps");
    const query = String(new URLSearchParams(chosen.map((name) => ["run", name])));
    useEffect(() => {
      history.replaceState(null, "", `/compare?${query}`);
      const read = () => fetch(`/compare/data?${query}`).then((answer) => answer.ok && answer.json()).then((data) => data && setData(data)).catch(() => {});
      read();
      const timer = setInterval(read, 5000);
      return () => clearInterval(timer);
    }, [query]);
    const curve = (name, about) => {
      const runs = found.runs.filter((run) => run.curves[name].some(isNumber));
      if (!runs.length) return null;
      const [x, ...values] = uPlot.join(runs.map((run) => [run.curves[by], run.curves[name]]));
      const lines = runs.map((run, i) => ({ name: run.run, values: values[i], color: LINES[found.runs.indexOf(run) % LINES.length] }));
      return html`<${Chart} key=${name + by + query} title=${name} about=${about} x=${x} lines=${lines} />`;
    };
    const cells = (p) => p ? [p.step, number(p.reward_mean), whole(p.tokens), duration(p.seconds), usd(p.usd)] : ["-", "-", "-", "-", "-"];
    return html`<main><header><h1>Runs compared</h1><span class="grow"></span><a href="/">All runs</a><button type="button" onClick=${toggleTheme}>Light or dark</button></header>
      <${Section} title="Runs"><div class="row">${names.map((name) => html`<label key=${name}><input type="checkbox" checked=${chosen.includes(name)}
        onChange=${(e) => { const isChosen = e.target.checked; setChosen((former) => isChosen ? [...former, name] : former.filter((each) => each !== name)); }} /> ${name}</label>`)}</div>
        ${!found && html`<p role="status">Choose two or more runs.</p>`}
        ${found?.runs.filter((run) => run.ancestors.length).map((run) => html`<p key=${run.run} class="dim">${run.run} continues from ${run.ancestors.join(", from ")}: tokens, time and dollars are its own.</p>`)}<//>
      ${found && html`<${Section} title="Curves"><div class="row"><label>Over <select value=${by} onChange=${(e) => setBy(e.target.value)}>
          ${Object.entries(AXES).map(([axis, words]) => html`<option key=${axis} value=${axis}>${words}</option>`)}</select></label></div>
        <div class="charts">${curve("reward_mean", "Mean reward of a step.")}${curve("eval_reward_mean", "Mean reward on held-out prompts.")}</div><//>
      <${Section} title="At the same point"><${Scroll} label="Table of the runs at the same point"><table><thead><tr>${["At the same", "Run", "Step", "Reward, mean of 10 steps", "Tokens", "Time", "Dollars"].map((each) => html`<th scope="col" key=${each}>${each}</th>`)}</tr></thead>
        <tbody>${Object.entries(found.same).flatMap(([axis, point]) => Object.entries(point.runs).map(([run, at]) => html`<tr key=${axis + run}><td>${POINTS[axis](point.at)}</td><td>${run}</td>
          ${cells(at).map((each, i) => html`<td key=${i}>${each}</td>`)}</tr>`))}</tbody></table><//><//>
      ${found.over_seeds.length > 0 && html`<${Section} title="Over seeds"><p class="dim">Runs that differ in their seed only, at the last step that all have reached; ± is the standard error of the mean.</p>
        <${Scroll} label="Means over seeds"><table><thead><tr>${["Job", "Runs", "Step", "Reward, mean of 10 steps", "Held out", "Dollars, mean"].map((each) => html`<th scope="col" key=${each}>${each}</th>`)}</tr></thead>
        <tbody>${found.over_seeds.map((each) => html`<tr key=${each.runs[0]}><td>${Object.entries(each.fields).map(([field, value]) => `${field} ${value}`).join(", ") || "all"}</td><td>${each.runs.join(", ")}</td>
          <td class="num">${each.step}</td><td>${withError(each.reward_mean, each.reward_error)}</td><td>${withError(each.eval_reward_mean, each.eval_reward_error)}</td><td class="num">${usd(each.usd)}</td></tr>`)}</tbody></table><//><//>`}
      <${Section} title="Changed fields of the job"><${Scroll} label="Changed fields"><table><thead><tr><th scope="col">Field</th>${found.runs.map((run) => html`<th scope="col" key=${run.run}>${run.run}</th>`)}</tr></thead>
        <tbody>${Object.entries(found.changed).map(([field, values]) => html`<tr key=${field}><td>${field}</td>${found.runs.map((run) => html`<td key=${run.run}>${run.run in values ? JSON.stringify(values[run.run]) : "-"}</td>`)}</tr>`)}</tbody></table><//><//>`}</main>`;
  }

  class Shell extends Component {
    componentDidCatch(error) { this.setState({ error }); }
    render() {
      const { error } = this.state;
      return error ? html`<main><section role="alert" class="failed">The page cannot be drawn: ${String(error)}</section></main>` : !frozen && location.pathname === "/compare" ? html`<${Comparison} />` : html`<${Page} />`;
    }
  }
  const root = document.getElementById("app");
  root.textContent = "";
  render(html`<${Shell} />`, root);
})();
